"""Commands on profiles and plans; none needs a GPU."""
