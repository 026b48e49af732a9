class Guards:
    def hold(self):
        return True

    def changed(self):
        return ""
