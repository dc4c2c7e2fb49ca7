"""Photos by record and replay, beside torch and DALI by hand."""
