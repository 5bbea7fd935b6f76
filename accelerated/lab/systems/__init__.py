"""What the four papers did beyond language modelling; the commands train and measure it."""
