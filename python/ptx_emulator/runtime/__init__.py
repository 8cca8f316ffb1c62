"""The CuTe DSL's side: how a compiled host function reaches the emulator."""
