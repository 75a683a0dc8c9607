"""What a larger job would give: pure arithmetic on what was measured, published or declared."""
