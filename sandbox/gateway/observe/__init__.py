"""What the gateway tells about itself: statistics, their history, and traces."""
