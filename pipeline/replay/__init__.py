"""A run folded once more through its real cores, from its archived journals. Nothing outside the cores is done."""
