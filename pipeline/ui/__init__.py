"""A run as a web page: its events become views (`_data`), a server on loopback shows them, report.html keeps them."""
