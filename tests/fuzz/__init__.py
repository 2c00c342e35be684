"""What nobody should give to twoshift; `make fuzz` gives it much of it."""
