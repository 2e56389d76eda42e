"""TLS on data connections, by certificates that admitted peers hand out."""
