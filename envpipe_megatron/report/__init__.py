"""What a person reads afterwards: pictures of plans, profiles and runs."""
