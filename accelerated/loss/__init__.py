"""The loss of targets: its logits exist a chunk at a time."""
