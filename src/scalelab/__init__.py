"""scalelab: how does my PyTorch training scale, why, and what would it take to go further?"""

__version__ = "0.1.0"
