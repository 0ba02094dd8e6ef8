"""The worker: moves samples from prompt to verified file. Started by exec, fenced by its epoch, never imports torch."""
