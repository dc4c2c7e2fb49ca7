"""The check's verdicts and predictions, against loops of known truth."""
