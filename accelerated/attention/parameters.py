""""""

import torch
from torch import nn


def parameter_tree(params, dtype=torch.float32):
    """{dotted name: array} -> module whose attributes follow the dots; children named 0, 1, ... become a ModuleList."""
    branches, tree = {}, nn.Module()
    for name, array in params.items():
        head, _, rest = name.partition(".")
        if rest:
            branches.setdefault(head, {})[rest] = array
        else:
            tree.register_parameter(head, nn.Parameter(torch.tensor(array, dtype=dtype)))
    for head, branch in branches.items():
        tree.add_module(head, parameter_tree(branch, dtype))
    if branches and all(head.isdigit() for head in branches):
        return nn.ModuleList(tree.children())
    return tree


def adopt_parameters(module, params):
    """Give module the parameters of params (a reference's init_params) in torch's default dtype."""
    tree = parameter_tree(params, torch.get_default_dtype())
    for name, parameter in tree.named_parameters(recurse=False):
        module.register_parameter(name, parameter)
    for name, child in tree.named_children():
        module.add_module(name, child)
