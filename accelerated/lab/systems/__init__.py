"""What the four papers did beyond language modelling: one file each; the commands beside them train and measure them."""
