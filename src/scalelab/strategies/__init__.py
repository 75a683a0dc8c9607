"""How the training is spread over ranks: a strategy is a function from model to model."""
