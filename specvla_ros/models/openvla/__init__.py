"""OpenVLA: the family of Prismatic policies that answer with bins."""
