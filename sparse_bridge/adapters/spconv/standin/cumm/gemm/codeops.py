"""Integer helpers."""


def div_up(a, b):
    return -(-a // b)


def align_up(a, b):
    return div_up(a, b) * b
