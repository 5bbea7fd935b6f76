"""What a training run is made of: options, settings, its start, optimisation, saving, processes."""
