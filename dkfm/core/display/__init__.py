"""Format text for display: bytes and seconds, tables, cards for notebooks, and terminal output."""
