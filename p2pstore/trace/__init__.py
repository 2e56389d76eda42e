"""Replaying traces of requests to an inference service on the code that decides: what is kept, and what that saves."""
