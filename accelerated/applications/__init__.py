"""What the four papers did beyond language modelling: one file each; the tables of accelerated/experiments measure them."""
