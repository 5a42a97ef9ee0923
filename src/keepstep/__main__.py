"""`python -m keepstep`: the command, where its script is not on the path."""

from keepstep.cli.main import main

if __name__ == "__main__":
    main(prog_name="keepstep")
