"""Replaying traces of requests to an inference service on the deciding code: hits and savings of a cache."""
