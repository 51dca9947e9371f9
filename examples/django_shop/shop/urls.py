"""Addresses of the shop."""

from django.urls import path

from . import views

urlpatterns = [path("buy/<str:item>", views.buy), path("orders/<int:number>", views.show)]
