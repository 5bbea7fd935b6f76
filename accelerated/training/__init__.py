"""What a training run is made of: settings, options, optimisation, checkpoints, published weights, processes, the log."""
