"""One document, thin renderers."""
