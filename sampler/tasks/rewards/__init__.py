"""How answers and lengths are judged."""
