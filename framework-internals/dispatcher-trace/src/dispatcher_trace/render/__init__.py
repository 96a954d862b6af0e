"""A trace as text, as an HTML page and as a Chrome trace; summarized by source line; compared with another trace."""
