from .guards import Guards


class Audit:
    def __init__(self, model, tensors):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *a):
        pass

    def guards(self):
        return Guards()
