"""What people see: the live screen, plain lines, status."""
