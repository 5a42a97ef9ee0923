"""torch's flight-recorder dumps -> one small summary a rank. Nothing is decided here; `keepstep.attribution.hang` does that.

`files` finds dumps and tells their ranks, `dump` parses one as data, `summary` keeps what a comparison needs, `reading` does all
of them with bounded memory, on several cores when there are many.
"""
