"""Online learning: a draft that was trained goes on learning from what its target was asked since."""
