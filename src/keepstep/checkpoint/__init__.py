"""The on-disk format: layout, streaming writer, manifest and signature, commit, verification, lineage, quarantine.

Importing it loads neither torch nor cryptography: `keepstep.checkpoint.torch` alone imports torch, signing imports
cryptography where it is used.
"""
