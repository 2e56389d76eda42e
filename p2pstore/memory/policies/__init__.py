"""Which of many objects are worth keeping: policies of eviction behind one interface."""
