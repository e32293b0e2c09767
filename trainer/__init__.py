"""The Trainer and what runs around it; see README.md for how the parts meet."""
