HELP = "x"


def arguments(parser):
    pass


def run(args):
    return 0
