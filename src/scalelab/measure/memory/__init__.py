"""The memory of a step: recorded, forecast without allocating, and limited."""
