"""Cost model: step time, memory and communication of a strategy, each as terms with a formula and a source."""
