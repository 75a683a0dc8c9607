"""Post-training int8: ranges, scales, integer arithmetic to the last bit, and models that really run in int8."""
