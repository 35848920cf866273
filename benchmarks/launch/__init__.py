"""The launcher's collector and bill, measured."""
