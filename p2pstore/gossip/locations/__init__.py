"""Which member holds which key: logs, views of them, the table of all records."""
