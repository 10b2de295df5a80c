"""Text for people: bytes and seconds, tables, cards of notebooks, and what a terminal shows. It knows no array."""
