"""Other programs' interfaces to the store. Each module here is for one of them, and none is imported by the rest."""
