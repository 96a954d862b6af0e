"""stub"""


def missing():
    return "not yet"
def define(): ...
def register(): ...
