"""Resnet."""
