"""The laboratory of a published course: lenet in int8 by hand, stage by stage."""
