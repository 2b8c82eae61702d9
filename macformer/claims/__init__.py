"""What the paper claims of RMFA itself, measured: no training, no data sets."""
