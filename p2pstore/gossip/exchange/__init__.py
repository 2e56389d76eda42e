"""What is compared with whom, when, and what travels."""
