"""Where ranks are: the cores and devices each one owns."""
