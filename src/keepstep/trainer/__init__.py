"""What a training script imports: `import keepstep.trainer as ks` (CONTRACT section 6)."""

from keepstep.trainer.checkpointer import Checkpointer as Checkpointer
from keepstep.trainer.run import Decision as Decision
from keepstep.trainer.run import Run as Run
from keepstep.trainer.run import current as current
from keepstep.trainer.run import init as init
