"""The first waist: what one training step costs."""
