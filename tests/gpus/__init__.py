"""What only several GPUs of one host can show."""
