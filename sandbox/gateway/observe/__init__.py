"""What the gateway tells about itself: metrics, statistics, their history, and traces."""
